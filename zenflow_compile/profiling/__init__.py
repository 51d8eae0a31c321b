"""Records what ran when, and says how much of it was hidden."""
