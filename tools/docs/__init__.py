"""What of the documentation is generated: references, the page of benchmarks, pictures; and the hooks of the site."""
