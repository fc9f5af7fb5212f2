"""The traffic router: sends requests only where they can be served. A process of its own."""
