"""The standard cases, one module a room. Each function is a statement that holds for every backend."""
