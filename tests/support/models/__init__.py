"""Small models, and trainers of frameworks around them."""
