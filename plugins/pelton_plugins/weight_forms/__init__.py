"""Forms of quantized weights in memory, which plugins that read checkpoints share."""
