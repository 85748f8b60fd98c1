"""A Pelton plugin that brings a device: platform, attention backend and worker."""
