"""Models without an entry of their own: transformers' modules, with Pelton's products, norms and paged attention in them."""
