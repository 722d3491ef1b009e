"""The steps; each is frozen once it was released."""
