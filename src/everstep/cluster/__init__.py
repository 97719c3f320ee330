"""Where processes live: batches that travel, dispatch, placement, environments, and the two launchers."""
