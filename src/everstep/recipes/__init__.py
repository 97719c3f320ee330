"""The training loops. Each reads from top to bottom and knows no process, no socket and no rank."""
