"""Data parallelism: several engines behind one client, and the routers that pick one for each request."""
