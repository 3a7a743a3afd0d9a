"""The routes, by subject. Each module has `router(services)`."""
