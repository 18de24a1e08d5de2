"""Write the chart's dashboards."""

from tools.dashboards.write import FOLDER, rendered


def main() -> None:
    """Write each dashboard to its file."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)


if __name__ == "__main__":
    main()
