"""The reference backend; the others are distributions of their own."""
