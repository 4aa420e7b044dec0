"""Statements that are compiled once and then sent as text. Building a statement, finding it in the cache of SQLAlchemy
and processing its parameters costs many times what the database needs for a few rows. So does the result of SQLAlchemy,
which learns its columns anew each time: statements are run by the driver, and their rows are named tuples.

A set of values is one parameter, however many there are. So the text stays the same, and PostgreSQL can keep its plan.
The parameter is a text: psycopg needs more time to make an array than PostgreSQL needs for the rows.
"""

import json
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    Connection,
    Float,
    Integer,
    String,
    Text,
    any_,
    bindparam,
    cast,
    column,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from evalpool.schemas.packing import Packed, pack

SEPARATOR = "\x1f"
"""The character between the values of a set in PostgreSQL. No id and no name of an image contains it."""
LONGEST = 16 << 20
"""Characters of rows in one statement, unless a single row is longer. PostgreSQL refuses messages of 1 GiB, and client
and server hold several copies of each."""

_dump = json.JSONEncoder(ensure_ascii=False).encode


class _Compiled(NamedTuple):
    """The text of a statement for one kind of database."""

    sql: str
    names: tuple[str, ...] | None
    """The names of the parameters in the order of their places; `None` if the database takes them by name."""
    constants: dict[str, Any]
    """The values that are part of the statement."""


class Rows(list[Any]):
    """The rows that a statement has returned, as named tuples."""

    def one(self) -> Any:
        """Return the only row."""
        (row,) = self
        return row

    def scalar(self) -> Any:
        """Return the first value of the first row, or `None` if there is no row."""
        return self[0][0] if self else None


class Statement:
    """A statement with parameters, which is built for a kind of database when it is first run there. The values that it
    returns are those of the driver."""

    def __init__(self, build: Callable[[bool], Any], columns: Sequence[str] | None = None) -> None:
        """`build` returns the statement for PostgreSQL, if its argument is true, or for SQLite. `columns` are those of
        an INSERT without values."""
        self._build, self._columns = build, columns
        self._compiled: dict[str, _Compiled] = {}
        self._row: dict[str, Any] = {}
        """The type of the rows that it returns, by kind of database."""

    def run(self, db: Connection, **values: Any) -> Rows:
        """Run the statement with these values. A list is a set of texts, see `among`."""
        sql, names, constants = self._compiled.get(db.dialect.name) or self._compile(db)
        values |= constants
        if names is None:
            for name, value in values.items():
                if isinstance(value, list):
                    values[name] = SEPARATOR.join(value)
            return self._execute(db, sql, values)
        listed = (values[name] for name in names)
        return self._execute(
            db, sql, tuple(json.dumps(value) if isinstance(value, list) else value for value in listed)
        )

    def _execute(self, db: Connection, sql: str, parameters: Any) -> Rows:
        if db.dispatch.before_cursor_execute:  # somebody watches the statements of SQLAlchemy
            result = db.exec_driver_sql(sql, parameters)
            return Rows(result.all() if result.returns_rows else ())
        cursor: Any = db.connection.cursor()
        try:
            cursor.execute(sql, parameters)
            if cursor.description is None:
                return Rows()
            make = self._row.get(db.dialect.name) or self._name(db, cursor.description)
            return Rows(map(make, cursor.fetchall()))
        except BaseException as error:
            # Raises the error as SQLAlchemy would, and gives up a connection that is lost.
            db._handle_dbapi_exception(error, sql, parameters, cursor, None)
        finally:
            cursor.close()

    def _name(self, db: Connection, description: Sequence[Any]) -> Any:
        row: Any = namedtuple("Row", [each[0] for each in description], rename=True)  # type: ignore[misc]
        self._row[db.dialect.name] = row._make
        return row._make

    def run_many(self, db: Connection, rows: Iterable[Mapping[str, Any]]) -> None:
        """Run the statement for each of these rows of values."""
        sql, names, constants = self._compiled.get(db.dialect.name) or self._compile(db)
        if names is None:
            db.exec_driver_sql(sql, [{**row, **constants} for row in rows])
        else:
            take = itemgetter(*names)
            db.exec_driver_sql(sql, [take({**row, **constants}) for row in rows])

    def _compile(self, db: Connection) -> _Compiled:
        statement = self._build(db.dialect.name == "postgresql")
        compiled = statement.compile(dialect=db.dialect, column_keys=self._columns)
        constants = {name: bind.value for name, bind in compiled.binds.items() if not bind.required}
        names = tuple(compiled.positiontup) if compiled.positional else None
        made = _Compiled(str(compiled), names, constants)
        self._compiled[db.dialect.name] = made
        return made


class Insertion:
    """Inserts rows that have exactly these columns. Rows that exist already stay as they are."""

    def __init__(self, table: Any, columns: Sequence[str], *, returned: str | None = None, sum_of: str = "") -> None:
        """With `sum_of`, the value of this column is added to that of the row that exists."""
        self._table, self._columns, self._returned, self._sum_of = table, tuple(columns), returned, sum_of
        self._packed = tuple(name for name in columns if isinstance(table.c[name].type, Packed))
        self._statement = Statement(self._build, self._columns)
        key = table.c[returned or columns[0]]
        self._stored = Statement(lambda postgres: select(key).where(among(key, "ids", postgres)))

    def run(self, db: Connection, rows: Sequence[Mapping[str, Any]]) -> set[Any]:
        """Insert rows. Returns the column `returned` of those that did not exist."""
        rows = [{**row, **{name: pack(row[name]) for name in self._packed}} for row in rows] if self._packed else rows
        if db.dialect.name == "postgresql":
            # Many rows are one parameter: PostgreSQL and its driver need more time for thousands of parameters than for
            # the rows themselves.
            new: set[Any] = set()
            for texts in _portions(map(_dump, rows)):
                added = self._statement.run(db, all_rows=f"[{','.join(texts)}]")
                new.update(() if self._returned is None else (row[0] for row in added))
            return new
        if self._returned is None:
            self._statement.run_many(db, rows)
            return set()
        # SQLite has one writer at a time, so that nobody inserts rows between the two statements.
        name = self._returned
        stored = {row[0] for row in self._stored.run(db, ids=[row[name] for row in rows])}
        if missing := [row for row in rows if row[name] not in stored]:
            self._statement.run_many(db, missing)
        return {row[name] for row in missing}

    def _build(self, postgres: bool) -> Any:
        add: Any = (postgresql if postgres else sqlite).insert(self._table)
        if postgres:
            columns = [self._table.c[name] for name in self._columns]
            plain = [column(each.name, Text() if isinstance(each.type, Packed) else each.type) for each in columns]
            given_rows = func.json_to_recordset(cast(given("all_rows"), postgresql.JSON)).table_valued(*plain)
            add = add.from_select(columns, select(*given_rows.render_derived(with_types=True).c))
        if self._sum_of:
            total = self._table.c[self._sum_of] + add.excluded[self._sum_of]
            add = add.on_conflict_do_update(index_elements=self._table.primary_key, set_={self._sum_of: total})
        else:
            add = add.on_conflict_do_nothing()
        return add.returning(self._table.c[self._returned]) if postgres and self._returned else add


def _portions(texts: Iterable[str]) -> Iterator[list[str]]:
    """Divide texts into portions of at most `LONGEST` characters. A longer text is a portion by itself."""
    portion, length = list[str](), 0
    for each in texts:
        if portion and length + len(each) > LONGEST:
            yield portion
            portion, length = [], 0
        portion.append(each)
        length += len(each)
    if portion:
        yield portion


def given(name: str) -> Any:
    """A parameter that is a text. Its name must not be that of a column."""
    return bindparam(name, required=True, type_=String())


def seconds(name: str) -> Any:
    """A parameter that is a number of seconds."""
    return bindparam(name, required=True, type_=Float())


def number(name: str) -> Any:
    """A parameter that is a whole number."""
    return bindparam(name, required=True, type_=Integer())


def among(which: Any, name: str, postgres: bool) -> Any:
    """The SQL condition that a column of texts has one of the values of this parameter, which is a list."""
    if postgres:
        return which == any_(func.string_to_array(given(name), literal_column(f"chr({ord(SEPARATOR)})")))
    return which.in_(text(f"SELECT value FROM json_each(:{name})"))


def one_of(which: Any, values: Iterable[str]) -> Any:
    """The SQL condition that a column has one of these words, which are part of the statement."""
    return text(f"{which} IN ({', '.join(repr(str(value)) for value in values)})")
