"""Arrays in, arrays out: the mathematics, one pure function per theorem, with no NumPyro in sight."""
