"""The fused ops, their selection, and the torch reference of each."""
