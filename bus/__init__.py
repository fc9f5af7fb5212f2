"""What arrives and leaves on NATS; a trainer can use this package on its own."""
