"""What a run tells: events, metrics, console, report."""
