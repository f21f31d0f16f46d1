"""The pieces of a search for the worst features, and the climb they make."""
