"""Histograms as Prometheus has them, which plugins that count share."""
