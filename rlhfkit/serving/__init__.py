"""HTTP servers that let nobody in by default. The modules are imported one by one: the token needs no web framework."""
