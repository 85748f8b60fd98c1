"""AMD GPUs, by torch's HIP build. Not tried on such a device yet."""
