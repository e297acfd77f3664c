"""The seed of a run's random operands: fresh each time, printed in the header, repeated with LOWLAT_TEST_SEED=N."""

import os
import time

SEED = int(os.environ.setdefault("LOWLAT_TEST_SEED", str(time.time_ns() % 1_000_000_007)))
