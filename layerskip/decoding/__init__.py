"""Draft, verify, accept: the decode loop, its statistics, and the engine that users call."""
