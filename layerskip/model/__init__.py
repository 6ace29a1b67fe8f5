"""A model that can stop and resume between layers, its shared cache, families and checkpoint metadata."""
