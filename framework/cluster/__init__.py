"""Know the hardware, find out who takes part, choose the strategy."""
