"""Facts about each parameter: its route, its logical matrices, its parts on ranks."""
