"""Fair comparisons of compression methods: ``kv-rag bench``."""
