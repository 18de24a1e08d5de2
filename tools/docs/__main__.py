"""Writes the generated files below docs/: `make generate`."""

from tools.docs.write import rendered


def main() -> None:
    """Write each file."""
    for path, text in rendered().items():
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
