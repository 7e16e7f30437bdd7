"""A student's vocabulary cut to the tokens that its recipe's texts use."""
