"""The pictures: each function takes plain numbers and returns a matplotlib figure."""
