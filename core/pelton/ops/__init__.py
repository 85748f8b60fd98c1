"""The fused seams, their selection, and the torch reference of each."""
