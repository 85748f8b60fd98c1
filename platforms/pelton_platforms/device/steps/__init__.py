"""One step on the device, from the scheduler's columns to sampled tokens and their way back."""
