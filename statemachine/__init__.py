"""What an inference engine may do now: pure rules, without I/O, asyncio or a clock."""
