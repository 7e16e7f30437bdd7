"""HTTP endpoints that are paid by the request: how they are asked, paced and remembered."""
