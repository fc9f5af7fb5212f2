"""The engine host: a child process with vLLM, or the simulated engine, in it."""
