"""The inference engine: continuous depth batching over one paged pool of keys and values."""
