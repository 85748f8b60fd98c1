"""An example package: a logits processor that forbids repeated n-grams."""
