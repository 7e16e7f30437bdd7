"""How good an encoder is: STS correlation, retrieval, speed."""
