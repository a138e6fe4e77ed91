"""Search for rows whose bits depend on anything but the row: its batch, its place, its chunk."""
