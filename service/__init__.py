"""The service: it runs what the state machine decides."""
