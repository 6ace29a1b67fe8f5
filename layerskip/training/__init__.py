"""Layer dropout, exit loss, curriculum and trainer."""
