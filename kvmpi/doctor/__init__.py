"""``kvmpi doctor``: looks for what keeps jobs from starting or makes them slow here, and says what to do about it."""
