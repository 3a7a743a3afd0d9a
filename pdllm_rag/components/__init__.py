"""What the components of every framework share: their fields, their engines, and how they read a request."""
