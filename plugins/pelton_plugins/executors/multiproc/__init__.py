"""One process a rank: the executor `multiproc`."""
