"""Where processes live: batches that travel, dispatch, environments; what runs in a rank (worker), and the launchers (controller and ray, local)."""

import os

# Read when ray is imported: the raylet's page about a killed worker is no news, the death is reported once, by us.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
