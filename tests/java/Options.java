package bookmender;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/** The options of a command, or the shape of a ledger: a JSON object with defaults. */
record Options(Map<?, ?> values) {
    boolean has(String name) {
        return values.get(name) != null;
    }

    long number(String name, long otherwise) {
        return has(name) ? ((Number) values.get(name)).longValue() : otherwise;
    }

    boolean flag(String name, boolean otherwise) {
        return has(name) ? (Boolean) values.get(name) : otherwise;
    }

    String text(String name, String otherwise) {
        return has(name) ? (String) values.get(name) : otherwise;
    }

    /** Empty where the option is not given. */
    List<Long> numbers(String name) {
        List<Long> numbers = new ArrayList<>();
        if (has(name)) {
            ((List<?>) values.get(name)).forEach(each -> numbers.add(((Number) each).longValue()));
        }
        return numbers;
    }

    /** Empty where the option is not given. */
    Options object(String name) {
        return new Options(has(name) ? (Map<?, ?>) values.get(name) : Map.of());
    }

    /** Empty where the option is not given. */
    List<Options> objects(String name) {
        List<Options> objects = new ArrayList<>();
        if (has(name)) {
            ((List<?>) values.get(name)).forEach(each -> objects.add(new Options((Map<?, ?>) each)));
        }
        return objects;
    }
}
