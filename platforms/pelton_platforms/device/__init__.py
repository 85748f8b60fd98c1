"""The worker of devices that compute with torch: weights, KV pool, step programs, graphs. CPU and CUDA share it, and so may platforms
of other packages: they get it by naming no worker of their own, or subclass `worker.DeviceWorker`."""
