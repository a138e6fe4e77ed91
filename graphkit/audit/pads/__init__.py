"""Search for pad rows and earlier batches that affect live rows or declared state."""
