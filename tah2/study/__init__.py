"""A study: variants post-trained from one base on the same data, compared at matched compute and written up."""
