"""Many worlds, over all cores, and what they showed together."""

from __future__ import annotations

import multiprocessing
import time
