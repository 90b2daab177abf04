"""The standard cases, one module for each family. Each function checks a statement that holds for every backend."""
