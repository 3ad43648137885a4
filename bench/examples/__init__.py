"""Real programs that call cupyflash the way a user would, each checked by a test against plain NumPy."""
