"""Imported by programs that import torch: their end does not look at all objects, which takes longer than many of them run."""

import atexit
import gc

atexit.register(gc.freeze)
