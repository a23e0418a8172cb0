"""What an operator is shown: findings about a group's state, in words, and the page that shows them."""
